"""Loading real models from local files and installed packages."""
