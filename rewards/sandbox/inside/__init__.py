"""Programs that run inside a sandbox, each one file that imports the standard library alone."""
