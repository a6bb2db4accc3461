"""What a prompt's attention looks like, and what a method leaves of it."""
