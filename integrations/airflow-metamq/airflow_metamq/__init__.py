"""A provider of Airflow: the messages of a topic start DAGs. Airflow finds it by the entry point of the package."""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """Returns the description of this provider, in the form that Airflow requires."""
    return {
        "package-name": "airflow-metamq",
        "name": "metamq",
        "description": "Starts DAGs by messages of metamq.",
        "queues": ["airflow_metamq.queue.MetamqMessageQueueProvider"],
        "triggers": [{"integration-name": "metamq", "python-modules": ["airflow_metamq.trigger"]}],
        "hooks": [{"integration-name": "metamq", "python-modules": ["airflow_metamq.hook"]}],
        "connection-types": [
            {
                "hook-class-name": "airflow_metamq.hook.MetamqHook",
                "hook-name": "metamq",
                "connection-type": "metamq",
                "ui-field-behaviour": {
                    "hidden-fields": ["schema"],
                    "relabeling": {"host": "ZooKeeper"},
                    "placeholders": {
                        "host": "zk1:2181,zk2:2181",
                        "extra": '{"security": {"ca": "/etc/metamq/ca.crt"}}',
                    },
                },
            }
        ],
    }
