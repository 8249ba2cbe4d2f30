"""Gives Airflow a folder before a test imports it: it writes its settings there."""

from __future__ import annotations

import os
import tempfile

_folder = tempfile.TemporaryDirectory(prefix="airflow-", ignore_cleanup_errors=True)
os.environ["AIRFLOW_HOME"] = _folder.name
