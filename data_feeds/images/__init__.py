"""Images of rows: loaded and validated. Imports core and data_feeds.rows. Begin with read_images.py."""
