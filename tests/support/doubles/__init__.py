"""Stand-ins that tests of several rooms share: nothing here is in the wheel.

`router`: a scripted worker behind real gRPC, and a router's engine on a simulated clock. `worker`: a scripted model and
a router of a few lines. `tokenizers`, `grammars`, `gguf_files`, `training`, `kernels`: small inputs.
`scripted_http`: an HTTP server that answers by script, under a clock that jumps.
"""
