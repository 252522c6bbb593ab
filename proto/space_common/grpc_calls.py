"""The end of an asyncio gRPC server: its calls end before the event loop does."""

import asyncio

import grpc.aio


async def stop_server(server: grpc.aio.Server, grace: float) -> None:
    """Stop the server, then wait a second at most for grpc's tasks of the calls that have ended.

    A task that is cancelled with the event loop would be reported on stderr as an error, with its traceback.
    """
    await server.stop(grace)
    calls = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == "_schedule_rpc_coro"]
    if calls:
        await asyncio.wait(calls, timeout=1.0)
