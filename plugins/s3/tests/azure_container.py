"""Make a container in Azurite: obstore has no call for that.

Usage: python azure_container.py PORT CONTAINER
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import os
import sys
from urllib.request import Request, urlopen

VERSION = "2021-08-06"


def main(port: str, container: str) -> None:
    """Send one signed request."""
    account = os.environ["AZURE_STORAGE_ACCOUNT_NAME"]
    key = base64.b64decode(os.environ["AZURE_STORAGE_ACCOUNT_KEY"])
    date = email.utils.formatdate(usegmt=True)
    signed = "\n".join(
        [
            "PUT",
            *[""] * 11,
            f"x-ms-date:{date}",
            f"x-ms-version:{VERSION}",
            # An emulator's path has the account, and so has the resource.
            f"/{account}/{account}/{container}",
            "restype:container",
        ]
    )
    mac = hmac.new(key, signed.encode(), hashlib.sha256).digest()
    request = Request(
        f"http://127.0.0.1:{port}/{account}/{container}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": VERSION,
            "Authorization": f"SharedKey {account}:{base64.b64encode(mac).decode()}",
            "Content-Length": "0",
        },
    )
    with urlopen(request, timeout=10.0):  # noqa: S310 - http of our own
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
