"""The gRPC face: `spaceserve.v1.Generate`, health and reflection, in front of the same engine as HTTP."""
