"""Fault injection: HTTP errors, dropped connections, dead workers, broken streams, to test your own client.

A script is a JSON object with ``rules``, and a ``seed`` for random choices. A rule selects requests and says what
happens to them::

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
        engine.faults = Faults([{"kind": "drop", "rate": 0.05}], seed=7)  # replaces the script and resets all counts
        engine.faults = None

**Conditions.** All conditions of a rule must hold; a rule without conditions applies to every request.

- ``path``: the path of the request, without the base path; by default the one that generates, "/generate" or vLLM's
  "/inference/v1/generate". Requests are counted per path.
- ``requests``: request numbers, one or a list. The first request is number 0.
- ``every``: every nth request. 3 selects the requests 2, 5, 8 and so on.
- ``rate``: a share of the requests, from 0 to 1. Whether request i is selected depends only on the script's seed, the
  rule's position in the script and i.
- ``rid``: prefix of the request's id, as the client sent it.
- ``after_abort_all``: only within this many seconds after all requests were aborted.
- ``times``: maximum number of requests.

**Kinds.** In place of a number a pair ``[least, most]`` draws one for each request, with the same seed as ``rate``.
Times are in seconds; null means until the client disconnects. ``after_events`` counts the events of a stream, the
closing "[DONE]" included. A stream that ends before its fault is not disturbed, and not counted in ``done``. If several
rules apply to a request, they act in their order, each on what the one before it let through: put "cut" last.

In place of a response, on any path:

- ``status``: respond with an HTTP ``status`` (500), ``headers`` and a ``body``, a string or any JSON (default: the
  engine's own error); 204 and 304 have no body.
- ``drop``: close the connection before the first byte, by ``how``: "rst", a reset, or "fin".
- ``refuse``: close the connection, by ``how``, and refuse new connections for ``seconds`` (1). Running
  requests continue. (A server cannot refuse the connection that brought the request, only later ones.)
- ``die``: kill the worker after ``after_events`` (0) of this response. All connections are closed, by ``how``, all
  requests are lost, new connections are refused. The worker returns after ``seconds`` (1), empty, on the same port.
- ``no_answer``: send nothing for ``seconds`` (null), not even headers.

Inside the engine, on the paths that generate, reported in the engine's own format:

- ``queue_full``: reject the request; in a stream that is an event with status 503 under HTTP 200.
- ``abort``: abort the request at ``after_tokens`` (1), without a client's request. One more token is sampled, as with
  any abort; 0: in the queue.
- ``retract_abort``: retract the request at ``after_tokens`` (1) and abort it. Its event repeats all tokens, in
  incremental streams too.
- ``version``: at ``after_tokens`` (1) set the engine's weight version to ``version`` (null: increment it).
- ``park``: leave the request in the queue for ``seconds`` (null), or until it is aborted or generation is continued.

In streams; "cut" and "drip" also in unstreamed responses:

- ``silence``: after ``after_events`` (0) send nothing for ``seconds`` (null).
- ``comments``: after ``after_events`` (0) send only comments for ``seconds`` (null), with a ``pause`` (0.05) between.
- ``drip``: write ``size`` (16) bytes at a time, chunk sizes included, with a ``pause`` (0.01) after each write.
- ``split``: send each event in chunks of ``size`` (1) bytes; a pair is drawn from for each chunk.
- ``glue``: send ``size`` (2) events in one chunk.
- ``cut``: close the connection, by ``how``: "rst" or "fin", after ``after_bytes`` of the body or ``after_events``; by
  default in place of the last chunk.
- ``error_event``: after ``after_events`` (0) send an error with ``message`` and ``code`` (500) in the format of the
  emulated version, or ``payload``, any JSON; then "[DONE]", unless ``done`` is false.
- ``done_without_finish``: send "[DONE]" in place of the terminal event, or after ``after_events``.
- ``double_event``: send the event after ``after_events`` (1) twice.
- ``drop_event``: omit the event after ``after_events`` (1).
- ``shrink``: the event after ``after_events`` (1) has ``tokens`` (1) less than the one before it.
- ``rewrite``: the event after ``after_events`` (1) has another ``what``, "id" or "logprob", at ``position`` (0).

"shrink" and "rewrite" need a cumulative stream, "retract_abort" an engine that retracts requests; vLLM has neither.

The mock model's output never changes: a client can resume an aborted generation from what it received, and the result
equals that of one undisturbed request.
"""
