import java.io.BufferedReader;
import java.io.InputStreamReader;

/** What the tests talk to: a question a line comes in, its outcome a line goes out. */
final class Dialog {
    interface Client {
        String ask(String question) throws Exception;
    }

    static void hold(Client client) throws Exception {
        System.out.println("ready");
        var questions = new BufferedReader(new InputStreamReader(System.in));
        for (String question = questions.readLine(); question != null; question = questions.readLine()) {
            try {
                System.out.println("answer\t" + client.ask(question));
            } catch (Exception error) {
                Throwable cause = error;
                while (cause.getCause() != null) {
                    cause = cause.getCause();
                }
                System.out.println("error\t" + cause.getMessage().replace('\n', ' '));
            }
        }
        System.exit(0);
    }

    private Dialog() {}
}
