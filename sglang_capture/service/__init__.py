"""The side service: indexes dumps, packs them into shards, and answers ``/capture`` over HTTP.

It runs beside one SGLang server on the same machine, and meets it in two places only: the spool (files that the plugin
publishes) and HTTP (requests that it marks). It never imports SGLang.

::

    settings   environment variables            core      all the parts of one service, started and stopped together
    monitor    the plugin's status              app       FastAPI: routes, problems, security
    indexer    spool → catalog                  routes/   the routes of design §4.4
    packer     catalog + spool → datasets       server    lock, socket, uvicorn
    budget     room in the spool, before a request is sent
    sender     one capture from request to record
    jobs       many of them, from a JSONL
"""
