"""Complete runs as functions that return a config. Each docstring gives the command, the time and what to expect."""
