"""No test asserts a timing: machines are shared, and a property holds however long its check took."""

from hypothesis import settings

settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")
