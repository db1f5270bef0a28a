"""The run page: run folders become one HTML file that opens without a server. Nothing is started, folders are read."""
