// snippet
import 'reflect-metadata';
import { ClientKafka } from '@nestjs/microservices';
import { lastValueFrom } from 'rxjs';
import { scan } from 'rxjs/operators';

/** NestJS's own client. The pattern is the prompt topic, the answers come on `<prompt topic>.reply`. */
export async function connect(servers, prompts) {
  const client = new ClientKafka({
    client: { clientId: 'ask', brokers: servers.split(',') },
    consumer: { groupId: `ask-${crypto.randomUUID()}` },
  });
  client.subscribeToResponseOf(prompts);
  await client.connect();
  return client;
}

/** The whole answer; an error is thrown, with the worker's message. */
export async function ask(client, prompts, question) {
  const completion = await lastValueFrom(client.send(prompts, prompt(question)));
  return completion.choices[0].message.content;
}

/** The answer as it grows: an Observable of the text so far. */
export function stream(client, prompts, question) {
  const chunks = client.send(prompts, { value: prompt(question), headers: { 'x-reply-mode': 'chunks' } });
  return chunks.pipe(
    scan((answer, chunk) => {
      // another id is another attempt: the worker was lost, and a second one began again
      const text = chunk.id === answer.id ? answer.text : '';
      return { id: chunk.id, text: text + chunk.choices[0].delta.content };
    }, {}),
  );
}

const prompt = (question) => ({ messages: [{ role: 'user', content: question }] });
// end snippet

const { BOOTSTRAP_SERVERS, PROMPTS } = process.env;
const client = await connect(BOOTSTRAP_SERVERS, PROMPTS);
const streamed = async (question) => (await lastValueFrom(stream(client, PROMPTS, question))).text;
const answer = process.argv[2] === 'stream' ? streamed : (question) => ask(client, PROMPTS, question);
const { createInterface } = await import('node:readline');
console.log('ready');
for await (const question of createInterface({ input: process.stdin })) {
  try {
    console.log(`answer\t${await answer(question)}`);
  } catch (error) {
    console.log(`error\t${error?.message ?? error}`);
  }
}
process.exit(0);
