"""The house around the compiler: settings, errors, reports, commands, packaging."""
