"""A DAG as a user of Airflow writes it: jobs and calls of a cluster, by Airflow's HTTP operators alone."""

from __future__ import annotations

import json
import os
import sys

from airflow.providers.http.operators.http import HttpOperator
from airflow.providers.http.sensors.http import HttpSensor
from airflow.sdk import DAG

FOLDER = os.environ["STOKER_TEST_FOLDER"]
HEADERS = {
    "Authorization": f"Bearer {os.environ['STOKER_TOKEN']}",
    "Content-Type": "application/json",
}


def submit(name: str, code: str) -> HttpOperator:
    """Submit a job; its result is the job's id."""
    entrypoint = f"cd {FOLDER} && {sys.executable} -c {code!r}"
    return HttpOperator(
        task_id=name,
        http_conn_id="stoker",
        endpoint="/v1/jobs",
        headers=HEADERS,
        data=json.dumps({"entrypoint": entrypoint, "name": name}),
        response_filter=lambda response: response.json()["job_id"],
    )


def succeeded(name: str) -> HttpSensor:
    """Wait for a job to succeed."""
    return HttpSensor(
        task_id=f"{name}_done",
        http_conn_id="stoker",
        endpoint=f"/v1/jobs/{{{{ ti.xcom_pull('{name}') }}}}",
        headers=HEADERS,
        response_check=lambda response: response.json()["state"] == "SUCCEEDED",
        poke_interval=0.5,
        timeout=60,
    )


def call(name: str, body: dict[str, object], filter_by: str) -> HttpOperator:
    """Call a function."""
    return HttpOperator(
        task_id=name,
        http_conn_id="stoker",
        endpoint="/v1/calls",
        headers=HEADERS,
        data=json.dumps({"namespace": "team", **body}),
        response_filter=lambda response: response.json()[filter_by],
    )


with DAG("stoker_dag", schedule=None):
    prepare = submit("prepare", 'open("number", "w").write("20")')
    doubled = submit(
        "double", 'n = int(open("number").read()); open("double", "w").write(str(2 * n))'
    )
    halved = submit("halve", 'n = int(open("number").read()); open("half", "w").write(str(n // 2))')
    add = call("add", {"function": "add_files", "args": [FOLDER], "async": True}, "ref")
    value = HttpOperator(
        task_id="value",
        http_conn_id="stoker",
        method="GET",
        endpoint="/v1/refs/{{ ti.xcom_pull('add') }}/value?wait_s=30",
        headers=HEADERS,
        response_filter=lambda response: response.json(),
    )
    keep = HttpOperator(
        task_id="keep",
        http_conn_id="stoker",
        method="PUT",
        endpoint="/v1/kv/team/total",
        headers=HEADERS,
        data="{{ ti.xcom_pull('value') }}",
    )
    tidy = HttpOperator(
        task_id="tidy",
        http_conn_id="stoker",
        method="DELETE",
        endpoint="/v1/jobs/{{ ti.xcom_pull('prepare') }}",
        headers=HEADERS,
    )
    ready = succeeded("prepare")
    prepare >> ready >> [doubled, halved]
    doubled >> succeeded("double") >> add
    halved >> succeeded("halve") >> add
    add >> value >> keep >> tidy
