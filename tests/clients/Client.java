// The checks of clients_test.py in Java: args[0] is the router; one line a check on stdout.
import grpc.health.v1.HealthGrpc;
import grpc.health.v1.HealthOuterClass.HealthCheckRequest;
import grpc.health.v1.HealthOuterClass.HealthCheckResponse;
import io.grpc.CallOptions;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.StreamObserver;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import millrace.v1.InferenceServiceGrpc;
import millrace.v1.Inference.GenerateRequest;
import millrace.v1.Inference.GenerateResponse;
import millrace.v1.Inference.SamplingParams;
import millrace.v1.Inference.TokenIds;

public final class Client {
  private static final String SERVICE = "millrace.v1.InferenceService";

  private static final class Bytes implements MethodDescriptor.Marshaller<byte[]> {
    @Override
    public InputStream stream(byte[] bytes) {
      return new ByteArrayInputStream(bytes);
    }

    @Override
    public byte[] parse(InputStream stream) {
      try {
        return stream.readAllBytes();
      } catch (IOException e) {
        throw new UncheckedIOException(e);
      }
    }
  }

  private static GenerateRequest request(int maxTokens, float temperature, String model) {
    return GenerateRequest.newBuilder()
        .setModel(model)
        .setTokenIds(TokenIds.newBuilder().addIds(5).addIds(6).addIds(7).addIds(8))
        .setSampling(SamplingParams.newBuilder().setMaxTokens(maxTokens).setTemperature(temperature).setIgnoreEos(true))
        .build();
  }

  // How the stream ended; the tokens until then go to `tokens`; `first` runs after each piece.
  private static String ending(Iterator<GenerateResponse> pieces, List<Integer> tokens, Runnable each) {
    try {
      while (pieces.hasNext()) {
        tokens.addAll(pieces.next().getTokenIdsList());
        each.run();
      }
      return "OK";
    } catch (StatusRuntimeException e) {
      return e.getStatus().getCode().name();
    }
  }

  private static void say(Object... words) {
    StringBuilder line = new StringBuilder();
    for (Object word : words) line.append(line.length() == 0 ? "" : " ").append(word);
    System.out.println(line);
    System.out.flush();
  }

  private static boolean reflects(ManagedChannel channel) throws Exception {
    Bytes bytes = new Bytes();
    MethodDescriptor<byte[], byte[]> method =
        MethodDescriptor.newBuilder(bytes, bytes)
            .setType(MethodDescriptor.MethodType.BIDI_STREAMING)
            .setFullMethodName("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
            .build();
    CompletableFuture<byte[]> answer = new CompletableFuture<>();
    StreamObserver<byte[]> ask =
        ClientCalls.asyncBidiStreamingCall(
            channel.newCall(method, CallOptions.DEFAULT),
            new StreamObserver<byte[]>() {
              @Override
              public void onNext(byte[] value) {
                answer.complete(value);
              }

              @Override
              public void onError(Throwable t) {
                answer.completeExceptionally(t);
              }

              @Override
              public void onCompleted() {}
            });
    ask.onNext(new byte[] {0x3a, 0}); // list_services: ""
    boolean found = new String(answer.get(10, TimeUnit.SECONDS), StandardCharsets.ISO_8859_1).contains(SERVICE);
    ask.onCompleted();
    return found;
  }

  public static void main(String[] args) throws Exception {
    ManagedChannel channel =
        NettyChannelBuilder.forTarget(args[0])
            .usePlaintext()
            .keepAliveTime(10, TimeUnit.SECONDS)
            .keepAliveTimeout(5, TimeUnit.SECONDS)
            .keepAliveWithoutCalls(true)
            .build();
    InferenceServiceGrpc.InferenceServiceBlockingStub stub = InferenceServiceGrpc.newBlockingStub(channel);
    HealthGrpc.HealthBlockingStub health = HealthGrpc.newBlockingStub(channel);
    Iterator<HealthCheckResponse> watch = health.watch(HealthCheckRequest.newBuilder().setService(SERVICE).build());
    say("watch", watch.next().getStatus());

    say("health", health.check(HealthCheckRequest.getDefaultInstance()).getStatus());
    if (reflects(channel)) say("reflection", SERVICE);

    Runnable nothing = () -> {};
    List<Integer> tokens = new ArrayList<>();
    String how = ending(stub.generate(request(16, 0, "")), tokens, nothing);
    say("generate", how, tokens.stream().map(String::valueOf).collect(Collectors.joining(",")));
    for (GenerateRequest wrong : List.of(request(16, -1, ""), request(16, 0, "no-such-model"), request(100000, 0, ""))) {
      say("status", ending(stub.generate(wrong), new ArrayList<>(), nothing));
    }
    try {
      HealthCheckRequest ready = HealthCheckRequest.newBuilder().setService(SERVICE).build();
      health.withDeadlineAfter(100, TimeUnit.MILLISECONDS).watch(ready).forEachRemaining(status -> {});
    } catch (StatusRuntimeException e) {
      say("deadline", e.getStatus().getCode());
    }
    Context.CancellableContext context = Context.current().withCancellation();
    context.run(() -> say("cancel", ending(stub.generate(request(480, 0, "")), new ArrayList<>(), () -> context.cancel(null))));

    say("done");
    say("watch", watch.next().getStatus(), System.currentTimeMillis());
    System.exit(0);
  }
}
