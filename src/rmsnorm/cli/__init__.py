"""The ``rmsnorm`` command: one file per subcommand, which parses and prints."""
