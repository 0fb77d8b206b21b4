"""``python -m stoker_migrations upgrade|check|history|backup|restore [--database-url URL]``."""

from __future__ import annotations

import sys

from stoker_migrations.command_line import main

sys.exit(main())
