"""``python -m stoker_migrations upgrade|check|history [--database-url URL]``."""

from __future__ import annotations

import sys

from stoker_migrations.command import main

sys.exit(main())
