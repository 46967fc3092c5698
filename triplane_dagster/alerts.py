"""Tell somebody about failed runs and overdue nights: one JSON message to a web hook and one e-mail each, as the
environment says.
"""

from __future__ import annotations

import logging
import os
import smtplib
import ssl
from email.message import EmailMessage
from typing import Any
from urllib.parse import unquote, urlsplit

import dagster as dg
import httpx

from triplane_dagster.jobs import EXPERIMENT_TAG
from triplane_dagster.lost_retries import WILL_RETRY_TAG

VARIABLE = "TRIPLANE_ALERT_WEBHOOK"
EMAIL_VARIABLE, SMTP_VARIABLE = "TRIPLANE_ALERT_EMAIL", "TRIPLANE_ALERT_SMTP"
"""Recipients, separated by commas; and the mail server as smtp://[user:password@]host[:port], or smtps:// for TLS from
the start. smtp:// uses STARTTLS where the server offers it, and refuses to send a password without it.
"""
TIMEOUT_S = 10.0
"""Time for the only attempt, in seconds: a sensor's tick must end within a minute."""
NO_RECEIVER = dg.SkipReason(f"neither {VARIABLE} nor {EMAIL_VARIABLE} is set")
_MAX_TEXT = 2000
_UNSAID = "This run has been marked as failed from outside the execution context."
"""Dagster's message if it gives none: the event before it tells why."""


@dg.run_failure_sensor(
    name="alert_on_failure",
    default_status=dg.DefaultSensorStatus.RUNNING,
    monitor_all_code_locations=False,
    description=f"Tells of each failed run: JSON to the URL in ${VARIABLE}, an e-mail to ${EMAIL_VARIABLE}.",
)
def alert_on_failure(context: dg.RunFailureSensorContext) -> dg.SkipReason | None:
    """Post and mail a failed run, unless Dagster launches it again."""
    if not has_receiver():
        return NO_RECEIVER
    run = context.dagster_run
    if run.tags.get(WILL_RETRY_TAG) == "true":
        return dg.SkipReason(f"the process of run {run.run_id} died; Dagster launches it again")
    tell(message(context), context.log)
    return None


def has_receiver() -> bool:
    """Whether the environment names somebody to tell."""
    return bool(os.environ.get(VARIABLE) or os.environ.get(EMAIL_VARIABLE))


def tell(told: dict[str, Any], log: logging.Logger) -> None:
    """Post and mail a message. An error of a receiver is logged, without its URL, which may hold a secret."""
    url, recipients = os.environ.get(VARIABLE), os.environ.get(EMAIL_VARIABLE)
    if url:
        try:
            with httpx.stream("POST", url, json=told, timeout=TIMEOUT_S) as reply:  # its body is not read
                reply.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else type(error).__name__
            log.warning(f"{told['text']}, and ${VARIABLE} did not take this message: {status}")
    if recipients:
        try:
            send_email(recipients, told)
        except (OSError, smtplib.SMTPException, ValueError) as error:
            reason = f"{type(error).__name__} {getattr(error, 'smtp_code', '')}".strip()
            log.warning(f"{told['text']}, and ${SMTP_VARIABLE} did not take this e-mail: {reason}")


def send_email(recipients: str, told: dict[str, Any]) -> None:
    """Send a message of `message` through ${SMTP_VARIABLE}, else the mail server of this machine.

    Raises OSError, SMTPException or ValueError.
    """
    server = urlsplit(os.environ.get(SMTP_VARIABLE) or "smtp://localhost:25")
    if server.scheme not in ("smtp", "smtps") or not server.hostname:
        raise ValueError(f"{SMTP_VARIABLE} is not smtp://host:port or smtps://host:port")
    mail = EmailMessage()
    mail["Subject"] = " ".join(told["text"].split())[:150]
    mail["To"] = recipients
    user = unquote(server.username or "")
    mail["From"] = user if "@" in user else recipients.split(",")[0]
    mail.set_content("\n".join(f"{name}: {value}" for name, value in told.items() if name != "text"))
    safe = ssl.create_default_context()
    at = (server.hostname, server.port or (465 if server.scheme == "smtps" else 25))
    with (
        smtplib.SMTP_SSL(*at, timeout=TIMEOUT_S, context=safe)
        if server.scheme == "smtps"
        else smtplib.SMTP(*at, timeout=TIMEOUT_S)
    ) as connection:
        connection.ehlo()
        if server.scheme == "smtp" and connection.has_extn("starttls"):
            connection.starttls(context=safe)
        if user:
            if not isinstance(connection.sock, ssl.SSLSocket):
                raise ValueError("the mail server offers no TLS: a password is not sent without it")
            connection.login(user, unquote(server.password or ""))
        connection.send_message(mail)


def message(context: dg.RunFailureSensorContext) -> dict[str, Any]:
    """Description of a failed run, as a JSON object; `text` is what chat services show."""
    run = context.dagster_run
    errors = [event.step_failure_data.error for event in context.get_step_failure_events()]
    causes = [(error.cause or error).message for error in errors if error is not None]
    error = " ".join((causes[0] if causes else _end_of(context)).split())[:_MAX_TEXT]
    partition = run.tags.get("dagster/partition")
    selected = run.asset_selection or ()  # of a run from an asset's page or a backfill, which has no tag of ours
    experiment = run.tags.get(EXPERIMENT_TAG) or next((key.path[0] for key in selected), None)
    what = f"assets of {experiment}" if experiment and run.job_name.startswith("__") else run.job_name
    return {
        "text": f"{what}{f' {partition}' if partition else ''} failed: {error}",
        "job": run.job_name,
        "experiment": experiment,
        "partition": partition,
        "run_id": run.run_id,
        "error": error,
    }


def _end_of(context: dg.RunFailureSensorContext) -> str:
    """Why a run ended without an error of a step, e.g. that its process was killed."""
    types = {dg.DagsterEventType.ENGINE_EVENT, dg.DagsterEventType.RUN_FAILURE}
    said = ""
    for entry in context.instance.all_logs(context.dagster_run.run_id, of_type=types):
        event = entry.get_dagster_event()
        if event.event_type is dg.DagsterEventType.RUN_FAILURE:
            break
        said = event.message or said
    told = context.failure_event.message or ""
    return said if said and told in ("", _UNSAID) else told
