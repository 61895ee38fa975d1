"""Administrative commands of the journal, as every Django project has them."""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "journal.settings")
    execute_from_command_line(sys.argv)
