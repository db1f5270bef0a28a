"""Run page: run folders become a single HTML file that opens without a server. Nothing is started, folders are read."""
