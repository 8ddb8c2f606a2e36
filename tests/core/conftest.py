"""Hypothesis' profiles: `--hypothesis-profile=unshrunk` for runs that only ask whether anything fails."""

from hypothesis import Phase, settings

settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])
