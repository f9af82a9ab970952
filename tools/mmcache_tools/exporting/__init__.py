"""The metrics of every process of a server, together: once as text, or through one port."""
