"""A store while a server uses it: the half of the scheduler, and the half of the worker."""
