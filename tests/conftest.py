"""Hypothesis profiles: no deadline, since machines are shared and first calls load code;
`--hypothesis-profile=quick` reports a failure without taking minutes to make it small."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile("patient", deadline=None)
settings.register_profile("quick", phases=(Phase.explicit, Phase.reuse, Phase.generate), deadline=None)
settings.load_profile("patient")
