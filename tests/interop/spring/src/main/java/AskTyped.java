// snippet
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.springframework.kafka.core.DefaultKafkaConsumerFactory;
import org.springframework.kafka.core.DefaultKafkaProducerFactory;
import org.springframework.kafka.listener.ContainerProperties;
import org.springframework.kafka.listener.KafkaMessageListenerContainer;
import org.springframework.kafka.requestreply.ReplyingKafkaTemplate;
import org.springframework.kafka.support.serializer.JacksonJsonDeserializer;
import org.springframework.kafka.support.serializer.JacksonJsonSerializer;

/**
 * Objects both ways: the route's reply header `__TypeId__: completion` says what to make of a reply. The reply topic is
 * one that no other route answers on: a reply without the header would stop this reader.
 */
public class AskTyped {
    public record Message(String role, String content) {}

    public record Prompt(List<Message> messages) {}

    public record Choice(Message message) {}

    public record Problem(String message, String code) {}

    public record Completion(List<Choice> choices, Problem error) {}

    private final String prompts;
    private final ReplyingKafkaTemplate<String, Prompt, Completion> template;

    public AskTyped(String servers, String prompts, String replies) throws InterruptedException {
        this.prompts = prompts;
        var mine = new ContainerProperties(replies);
        mine.setGroupId("ask-" + UUID.randomUUID()); // every instance reads every reply
        var completions = new JacksonJsonDeserializer<Completion>();
        completions.configure(
                Map.of("spring.json.type.mapping", "completion:" + Completion.class.getName()), false);
        var consumers = new DefaultKafkaConsumerFactory<String, Completion>(
                Map.of("bootstrap.servers", servers), new StringDeserializer(), completions);
        var producers = new DefaultKafkaProducerFactory<String, Prompt>(
                Map.of("bootstrap.servers", servers), new StringSerializer(), new JacksonJsonSerializer<Prompt>());
        template = new ReplyingKafkaTemplate<>(producers, new KafkaMessageListenerContainer<>(consumers, mine));
        template.setSharedReplyTopic(true);
        template.setDefaultReplyTimeout(Duration.ofSeconds(60));
        template.start();
        template.waitForAssignment(Duration.ofSeconds(30));
    }

    public String ask(String question) throws Exception {
        var prompt = new Prompt(List.of(new Message("user", question)));
        Completion completion = template.sendAndReceive(new ProducerRecord<>(prompts, prompt)).get().value();
        if (completion.error() != null) {
            throw new IllegalStateException(completion.error().code());
        }
        return completion.choices().get(0).message().content();
    }
    // end snippet

    public static void main(String[] arguments) throws Exception {
        var env = System.getenv();
        Dialog.hold(new AskTyped(env.get("BOOTSTRAP_SERVERS"), env.get("TYPED_PROMPTS"), env.get("TYPED_REPLIES"))::ask);
    }
}
