"""The accuracy benchmark's parts: what is asked (needles, forced), of whom (engine), and how it is
scored (metrics), kept (store) and shown (report)."""
