"""Settings of the checks of studies, which are run by hand."""

from hypothesis import settings

settings.register_profile("research", deadline=None)
settings.load_profile("research")
