"""Overload: four times what a system can bear is offered, and who is accepted must not notice."""
