"""The attention of a prompt, and how much of it a method keeps."""
