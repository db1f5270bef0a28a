"""Programs that run inside a sandbox. Each is one file that imports only the standard library."""
