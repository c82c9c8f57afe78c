"""The soak: hours of paced users on the real model and many on a toy engine, with gates on texts, leaks and memory."""
