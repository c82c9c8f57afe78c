"""The torch library both model services stand on: backends, KV, sampling."""
