"""RULER's parts: the tasks and who answers them (catalogue), where the samples come from
(generator), how they are answered (decoding), scored (scoring) and shown (report)."""
