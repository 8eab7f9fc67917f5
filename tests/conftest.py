"""Hypothesis profiles: `--hypothesis-profile=quick` reports a failure without taking minutes to make it small."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile("quick", phases=(Phase.explicit, Phase.reuse, Phase.generate), deadline=None)
