// snippet
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.springframework.kafka.core.DefaultKafkaConsumerFactory;
import org.springframework.kafka.core.DefaultKafkaProducerFactory;
import org.springframework.kafka.listener.ContainerProperties;
import org.springframework.kafka.listener.KafkaMessageListenerContainer;
import org.springframework.kafka.requestreply.ReplyingKafkaTemplate;
import org.springframework.kafka.support.TopicPartitionOffset;
import tools.jackson.databind.json.JsonMapper;

/** Strings both ways, replies on one partition of the shared reply topic. */
public class AskV4flash {
    private static final JsonMapper JSON = new JsonMapper();
    private final String prompts;
    private final ReplyingKafkaTemplate<String, String, String> template;

    public AskV4flash(String servers, String prompts, String replies, int replyPartition) throws InterruptedException {
        this.prompts = prompts;
        var mine = new ContainerProperties(
                new TopicPartitionOffset(replies, replyPartition, TopicPartitionOffset.SeekPosition.END));
        mine.setGroupId("ask-" + UUID.randomUUID());
        var consumers = new DefaultKafkaConsumerFactory<String, String>(
                Map.of("bootstrap.servers", servers), new StringDeserializer(), new StringDeserializer());
        var producers = new DefaultKafkaProducerFactory<String, String>(
                Map.of("bootstrap.servers", servers), new StringSerializer(), new StringSerializer());
        template = new ReplyingKafkaTemplate<>(producers, new KafkaMessageListenerContainer<>(consumers, mine));
        template.setSharedReplyTopic(true); // other clients read it too: what is not ours is no error
        template.setDefaultReplyTimeout(Duration.ofSeconds(60));
        template.setReplyErrorChecker(reply -> {
            Header event = reply.headers().lastHeader("x-event");
            boolean failed = event != null && new String(event.value()).equals("error");
            return failed ? new IllegalStateException((String) reply.value()) : null;
        });
        template.start();
        template.waitForAssignment(Duration.ofSeconds(30));
    }

    public String ask(String question) throws Exception {
        var body = Map.of("messages", List.of(Map.of("role", "user", "content", question)));
        var sent = template.sendAndReceive(new ProducerRecord<>(prompts, JSON.writeValueAsString(body)));
        var completion = JSON.readTree(sent.get().value()); // an error ends in an ExecutionException
        return completion.at("/choices/0/message/content").asString();
    }
    // end snippet

    public static void main(String[] arguments) throws Exception {
        var env = System.getenv();
        var client = new AskV4flash(env.get("BOOTSTRAP_SERVERS"), env.get("PROMPTS"), env.get("REPLIES"), 3);
        Dialog.hold(client::ask);
    }
}
