"""How many examples hypothesis tries: all of them in `make test-slow`, a quarter of them in `make test`.

@examples(60)
@given(masks(largest=20))
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

FEW, ALL = "few", "all"  # the profiles, and in them the examples of a test that gives no number
COUNTS = {FEW: 25, ALL: 100}

for profile, number in COUNTS.items():
    settings.register_profile(
        profile, max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    )


def examples(count: int, **options: Any) -> settings:
    """`count` examples under the profile "all", a quarter of them under "few", but 5 at least if there are so many."""
    share = settings.default.max_examples / COUNTS[ALL]
    return settings(max_examples=min(count, max(5, round(count * share))), **options)
