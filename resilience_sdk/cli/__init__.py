"""The `resilience` command: one module per subcommand, imported when it is asked for."""
