"""Faults in a box: the engine misbehaves as told, so that you can test your own client against it.

A script is a JSON object with ``rules``, and a ``seed`` for what is left to chance. A rule says which requests it is
for, and what happens to them::

    {
      "seed": 7,
      "rules": [
        {"kind": "status", "requests": 0, "status": 429, "headers": {"Retry-After": "0.2"}},
        {"kind": "silence", "every": 50, "after_events": [0, 5], "seconds": 2},
        {"kind": "die", "requests": 40, "after_events": 3, "seconds": 0.5},
        {"kind": "cut", "rate": 0.1, "how": "rst", "after_bytes": [0, 20000]}
      ]
    }

From the command line: ``streamfold serve --faults script.json``. In a test::

    with Loopback(faults=Faults.read("script.json")) as engine:
        ...
        assert engine.faults.done["cut"]  # how often it happened
        engine.faults = Faults([{"kind": "drop", "rate": 0.05}], seed=7)  # from now on; all counts begin again
        engine.faults = None

**Which requests.** All conditions of a rule must hold; a rule without any is for every request.

- ``path``: what is asked for, without the base path; by default where this engine generates, "/generate" or vLLM's
  "/inference/v1/generate". Each path counts its own requests.
- ``requests``: their numbers, one or a list. The first request is number 0.
- ``every``: every nth. 3 is for the requests 2, 5, 8 and so on.
- ``rate``: a share of the requests, from 0 to 1. Whether number i is among them depends on the script's seed, the
  rule's place in the script and i alone.
- ``rid``: what the request's id begins with, as the client has sent it.
- ``after_abort_all``: only so many seconds after all requests were aborted at most.
- ``times``: for so many requests at most.

**What happens.** In place of a number a pair ``[least, most]`` draws one for each request, by chance as ``rate`` does.
Times are in seconds, and null is for ever: until the client leaves. ``after_events`` counts the events of a stream,
the closing "[DONE]" too. A stream that is over before its fault is left alone, and is not counted in ``done``. Rules
that meet in one request act in their order, each on what the one before it left: put "cut" last.

Instead of an answer, on any path:

- ``status``: an HTTP ``status`` (500), with ``headers`` and a ``body``, a string or any JSON (else the engine's own);
  204 and 304 have none.
- ``drop``: the connection ends before a byte, by ``how``: "rst", which is a reset, or "fin".
- ``refuse``: the connection ends so, by ``how``, and for ``seconds`` (1) nobody listens: the system refuses connects.
  What runs goes on. (No server can refuse the connect that brought it the request, only those that follow.)
- ``die``: after ``after_events`` (0) of this answer the worker dies. All connections end, by ``how``, all requests are
  lost, connects are refused. It returns after ``seconds`` (1), empty, on the same port.
- ``no_answer``: nothing comes for ``seconds`` (null), not even headers.

Inside the engine, on the paths that generate, told in the engine's own words:

- ``queue_full``: turned away; in a stream that is an event with status 503 under HTTP 200.
- ``abort``: an abort that nobody asked for, at ``after_tokens`` (1). As ever one more token comes; 0: in the queue.
- ``retract_abort``: an abort of what was retracted, at ``after_tokens`` (1). Its event repeats everything, in
  incremental streams too.
- ``version``: at ``after_tokens`` (1) the engine's weight version becomes ``version`` (null: it counts up).
- ``park``: taken in, and left in the queue for ``seconds`` (null), or until it is aborted or all are continued.

In streams, "cut" and "drip" also in what is not streamed:

- ``silence``: after ``after_events`` (0) nothing comes for ``seconds`` (null).
- ``comments``: after ``after_events`` (0) only comments come for ``seconds`` (null), with a ``pause`` (0.05) between.
- ``drip``: ``size`` (16) bytes come in one write, chunk sizes included, and then a ``pause`` (0.01).
- ``split``: each event comes in chunks of ``size`` (1) bytes; of a pair each chunk draws its own.
- ``glue``: ``size`` (2) events come in one chunk.
- ``cut``: the connection ends, by ``how``: "rst" or "fin", after ``after_bytes`` of the body or ``after_events``; with
  neither, where the last chunk would be.
- ``error_event``: after ``after_events`` (0) an error comes, with ``message`` and ``code`` (500) in the shape of the
  release, or this ``payload``, any JSON; then "[DONE]", unless ``done`` is false.
- ``done_without_finish``: "[DONE]" comes in place of the terminal event, or after ``after_events``.
- ``double_event``: the event after ``after_events`` (1) comes twice.
- ``drop_event``: the event after ``after_events`` (1) is missing.
- ``shrink``: the event after ``after_events`` (1) holds ``tokens`` (1) less than the one before it.
- ``rewrite``: the event after ``after_events`` (1) tells another ``what``, "id" or "logprob", at ``position`` (0).

"shrink" and "rewrite" need a cumulative stream, "retract_abort" an engine that retracts; vLLM has neither.

What the model says is never disturbed: what was kept of a request can be gone on with, and the whole is what one
undisturbed request gives.
"""
