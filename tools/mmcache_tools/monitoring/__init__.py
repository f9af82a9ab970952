"""A real Prometheus over a played server: for the tests of the dashboard, and for its picture."""
