"""What reading the configuration takes: rules, errors, YAML, units, and what the machine has."""
