# The checks of clients_test.py in Ruby: ARGV[0] is the router; one line a check on stdout.
require "grpc"
require "millrace/v1/inference_services_pb"
require "grpc/health/v1/health_services_pb"

include Millrace::V1
Health = Grpc::Health::V1
SERVICE = "millrace.v1.InferenceService"
$stdout.sync = true

def request(max_tokens, temperature: 0, model: "")
  GenerateRequest.new(model: model, token_ids: TokenIds.new(ids: [5, 6, 7, 8]),
                      sampling: SamplingParams.new(max_tokens: max_tokens, temperature: temperature, ignore_eos: true))
end

def code_of(error)
  GRPC::Core::StatusCodes.constants.find { |name| GRPC::Core::StatusCodes.const_get(name) == error.code }
end

# The tokens until the stream ends, and how it ended; yields after each piece.
def ending(pieces)
  tokens = []
  pieces.each do |piece|
    tokens.concat(piece.token_ids.to_a)
    yield if block_given?
  end
  [tokens, "OK"]
rescue GRPC::BadStatus => error
  [tokens, code_of(error)]
end

channel = GRPC::Core::Channel.new(ARGV[0], {"grpc.keepalive_time_ms" => 10_000, "grpc.keepalive_timeout_ms" => 5_000,
                                            "grpc.http2.max_pings_without_data" => 0,
                                            "grpc.keepalive_permit_without_calls" => 1}, :this_channel_is_insecure)
stub = InferenceService::Stub.new(ARGV[0], :this_channel_is_insecure, channel_override: channel)
health = Health::Health::Stub.new(ARGV[0], :this_channel_is_insecure, channel_override: channel)
watch = health.watch(Health::HealthCheckRequest.new(service: SERVICE))
puts "watch #{watch.next.status}"

puts "health #{health.check(Health::HealthCheckRequest.new).status}"
raw = GRPC::ClientStub.new(ARGV[0], :this_channel_is_insecure, channel_override: channel)
same = proc { |bytes| bytes }
listed = raw.bidi_streamer("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", ["\x3a\x00".b], same, same).first
puts "reflection #{SERVICE}" if listed.include?(SERVICE)

tokens, how = ending(stub.generate(request(16)))
puts "generate #{how} #{tokens.join(',')}"
[request(16, temperature: -1), request(16, model: "no-such-model"), request(100_000)].each do |wrong|
  puts "status #{ending(stub.generate(wrong))[1]}"
end
begin
  health.watch(Health::HealthCheckRequest.new(service: SERVICE), deadline: Time.now + 0.1).each { |_| }
rescue GRPC::BadStatus => error
  puts "deadline #{code_of(error)}"
end
operation = stub.generate(request(480), return_op: true)
puts "cancel #{ending(operation.execute) { operation.cancel }[1]}"

puts "done"
puts "watch #{watch.next.status} #{(Time.now.to_f * 1000).to_i}"
