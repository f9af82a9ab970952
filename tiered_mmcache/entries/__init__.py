"""What an entry is: its key, its record and header, its result and further fields."""
