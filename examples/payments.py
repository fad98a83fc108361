"""A payment endpoint that clients may retry: the answer is lost, and the card is charged once.

Run it with `.venv/bin/python examples/payments.py` (it needs FastAPI and httpx, which `make test` installs). Each run
recreates payments.db.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel

import oncelog

FILE = Path("payments.db")
TOKENS = {"Bearer ada-token": "ada", "Bearer bob-token": "bob"}
charges: list[tuple[str, int]] = []


def get_user(scope: Any) -> str | None:
    """Return the user whose keys the request uses. Take it from the credential, never from an unverified value."""
    headers = dict(scope["headers"])
    return TOKENS.get(headers.get(b"authorization", b"").decode("latin-1"))


app = FastAPI()
app.add_middleware(oncelog.IdempotencyMiddleware, log=FILE, scope=get_user, required=True, in_flight="wait")


class Payment(BaseModel):
    """Body of a request."""

    amount: int


@app.post("/payments", status_code=201)
async def pay(payment: Payment, request: Request) -> dict[str, Any]:
    """Charge the card. The endpoint does not handle retries; the middleware does."""
    user = get_user(request.scope)
    if user is None:
        raise HTTPException(401)
    charges.append((user, payment.amount))
    return {"payment": len(charges), "amount": payment.amount}


async def send_requests() -> None:
    """Send the requests of two clients, with retries."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:

        async def send(user: str, key: str | None, amount: int) -> httpx.Response:
            headers = {"Authorization": f"Bearer {user}-token"} | ({"Idempotency-Key": key} if key else {})
            answer = await client.post("/payments", json={"amount": amount}, headers=headers)
            replayed = answer.headers.get("Idempotent-Replayed", "false")
            print(f"  {user} {key!s:5} {amount:4}  ->  {answer.status_code} replayed={replayed} {answer.text}")
            return answer

        print("ada pays, loses the answer, and tries again ten times at once")
        first = await send("ada", "k-1", 30)
        again = await asyncio.gather(*[send("ada", "k-1", 30) for _ in range(10)])
        assert {answer.content for answer in again} == {first.content}
        print("the same key with another amount; no key; and bob with the same key as ada")
        assert (await send("ada", "k-1", 99)).status_code == 422
        assert (await send("ada", None, 30)).status_code == 400
        assert (await send("bob", "k-1", 30)).json()["payment"] == 2
    assert charges == [("ada", 30), ("bob", 30)]
    print("charged:", charges)


def main() -> None:
    """Send all requests to a new log."""
    for name in (FILE, Path(f"{FILE}-wal"), Path(f"{FILE}-shm")):
        name.unlink(missing_ok=True)
    asyncio.run(send_requests())


if __name__ == "__main__":
    main()
