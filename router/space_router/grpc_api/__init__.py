"""The gRPC API: `spaceserve.v1.Generate`, health and reflection, on the same engine as HTTP.

A client needs only the address and grpcio-reflection, because the server describes its messages:

    import grpc
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel("127.0.0.1:50051") as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("spaceserve.v1.Generate").methods_by_name["Generate"]
        request, event = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        generate = channel.unary_stream(
            "/spaceserve.v1.Generate/Generate", request.SerializeToString, event.FromString
        )
        for step in generate(request(prompt="def fibonacci(n):", max_tokens=64, temperature=0)):
            print(step.text, end="", flush=True)
"""
