// The checks of clients_test.py in Go: argv[1] is the router; one line a check on stdout.
package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "millrace/v1"
)

// Debian's gRPC is older than the messages that today's protoc-gen-go makes.
type codec struct{}

func (codec) Marshal(message interface{}) ([]byte, error) { return proto.Marshal(message.(proto.Message)) }
func (codec) Unmarshal(data []byte, message interface{}) error {
	return proto.Unmarshal(data, message.(proto.Message))
}
func (codec) Name() string { return "proto" }

func say(words ...interface{}) { fmt.Println(words...) }

func check(err error) {
	if err != nil {
		say("error", err)
		os.Exit(1)
	}
}

// gRPC's own way to write a code: INVALID_ARGUMENT.
func codeOf(err error) string {
	name := status.Code(err).String()
	var text strings.Builder
	for i, letter := range name {
		if i > 0 && letter >= 'A' && letter <= 'Z' {
			text.WriteByte('_')
		}
		text.WriteRune(letter)
	}
	return strings.Replace(strings.ToUpper(text.String()), "CANCELED", "CANCELLED", 1)
}

func request(maxTokens int32, temperature float32, model string) *pb.GenerateRequest {
	ignore := true
	return &pb.GenerateRequest{
		Model:    model,
		Prompt:   &pb.GenerateRequest_TokenIds{TokenIds: &pb.TokenIds{Ids: []int32{5, 6, 7, 8}}},
		Sampling: &pb.SamplingParams{MaxTokens: &maxTokens, Temperature: &temperature, IgnoreEos: &ignore},
	}
}

// The tokens until the stream ends, and how it ended; calls `first` after the first piece.
func generate(stub pb.InferenceServiceClient, ctx context.Context, message *pb.GenerateRequest, first func()) ([]int32, string) {
	stream, err := stub.Generate(ctx, message)
	check(err)
	var tokens []int32
	for {
		piece, err := stream.Recv()
		if err != nil && err.Error() == "EOF" {
			return tokens, "OK"
		}
		if err != nil {
			return tokens, codeOf(err)
		}
		tokens = append(tokens, piece.TokenIds...)
		first()
	}
}

func main() {
	ctx := context.Background()
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure(), grpc.WithBlock(),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true}))
	check(err)
	stub := pb.NewInferenceServiceClient(forced{connection})
	const service = "millrace.v1.InferenceService"
	health := grpc_health_v1.NewHealthClient(connection)
	watch, err := health.Watch(ctx, &grpc_health_v1.HealthCheckRequest{Service: service})
	check(err)
	seen, err := watch.Recv()
	check(err)
	say("watch", seen.Status)

	answer, err := health.Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	check(err)
	say("health", answer.Status)
	reflection, err := grpc_reflection_v1alpha.NewServerReflectionClient(connection).ServerReflectionInfo(ctx)
	check(err)
	check(reflection.Send(&grpc_reflection_v1alpha.ServerReflectionRequest{
		MessageRequest: &grpc_reflection_v1alpha.ServerReflectionRequest_ListServices{}}))
	listed, err := reflection.Recv()
	check(err)
	for _, found := range listed.GetListServicesResponse().Service {
		if found.Name == service {
			say("reflection", found.Name)
		}
	}
	check(reflection.CloseSend())

	nothing := func() {}
	tokens, end := generate(stub, ctx, request(16, 0, ""), nothing)
	say("generate", end, strings.Trim(strings.Join(strings.Fields(fmt.Sprint(tokens)), ","), "[]"))
	for _, wrong := range []*pb.GenerateRequest{request(16, -1, ""), request(16, 0, "no-such-model"), request(100000, 0, "")} {
		_, end = generate(stub, ctx, wrong, nothing)
		say("status", end)
	}
	soon, release := context.WithTimeout(ctx, 100*time.Millisecond)
	waiting, err := health.Watch(soon, &grpc_health_v1.HealthCheckRequest{Service: service})
	for err == nil {
		_, err = waiting.Recv()
	}
	say("deadline", codeOf(err))
	release()
	until, cancel := context.WithCancel(ctx)
	_, end = generate(stub, until, request(480, 0, ""), cancel)
	say("cancel", end)

	say("done")
	seen, err = watch.Recv()
	check(err)
	say("watch", seen.Status, time.Now().UnixMilli())
}

// A connection whose calls use the codec above.
type forced struct{ *grpc.ClientConn }

func (c forced) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, options ...grpc.CallOption) (grpc.ClientStream, error) {
	return c.ClientConn.NewStream(ctx, desc, method, append(options, grpc.ForceCodec(codec{}))...)
}
