"""Checks of a machine, of an installation and of a running server, each with its remedy."""
