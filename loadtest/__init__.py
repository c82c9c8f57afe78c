"""Load tests: locust users, and a runner that starts the services, loads them and judges the result."""
