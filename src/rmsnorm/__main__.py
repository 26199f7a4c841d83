"""``python -m rmsnorm`` is the ``rmsnorm`` command."""

import sys

from rmsnorm.cli.main import main

sys.exit(main())
