"""The subcommands of both tools, a module each: options in, exit status out; the work is done elsewhere."""
