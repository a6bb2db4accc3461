"""The accuracy benchmark's parts: questions (needles, forced), the engine that answers (engine),
scores (metrics), stored results (store) and tables (report)."""
