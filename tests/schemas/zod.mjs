// Writes schemas as zod makes them: `npm install zod && node tests/schemas/zod.mjs > tests/schemas/zod.json`.
import { z } from "zod";

const leaves = {
  string: z.string(), email: z.email(), uuid: z.uuid(), url: z.url(), datetime: z.iso.datetime(), date: z.iso.date(),
  ipv4: z.ipv4(), base64: z.base64(), short: z.string().min(1).max(12), pattern: z.string().regex(/^[A-Z]{2}-\d{3}$/),
  starts: z.string().startsWith("ab"), number: z.number(), int: z.int(), positive: z.number().positive(),
  range: z.number().min(-5).max(5), step: z.int().multipleOf(5).min(0).max(100), boolean: z.boolean(), null: z.null(),
  any: z.any(), unknown: z.unknown(), literal: z.literal("yes"), literals: z.literal([1, 2, "three"]),
  enum: z.enum(["red", "green", "blue"]), nullable: z.string().nullable(), default: z.int().default(3),
  nonempty: z.array(z.string()).nonempty(), tuple: z.tuple([z.string(), z.int()]), record: z.record(z.string(), z.int()),
  rest: z.tuple([z.string()]).rest(z.boolean()), pairs: z.record(z.enum(["a", "b"]), z.boolean()),
};
const person = z.object({ name: z.string(), age: z.int().min(0).max(150), email: z.email().optional() });
const shape = z.discriminatedUnion("kind", [
  z.object({ kind: z.literal("circle"), radius: z.number() }),
  z.object({ kind: z.literal("square"), side: z.number() }),
]);
const tree = z.object({ value: z.int(), get children() { return z.array(tree); } });
const list = z.object({ value: z.string(), get next() { return list.nullable(); } });
const wholes = {
  person, shape, tree, list, people: z.object({ people: z.array(person).max(3) }), partial: person.partial(),
  strict: z.strictObject({ a: z.string(), b: z.int().optional() }), loose: z.looseObject({ a: z.string() }),
  catchall: z.object({ a: z.string() }).catchall(z.int()), picked: person.pick({ name: true }),
  union: z.object({ id: z.union([z.string(), z.int()]) }), both: z.intersection(person, z.object({ city: z.string() })),
  shapes: z.object({ shapes: z.array(shape).min(1).max(2), title: z.string().describe("What they show") }),
  nested: z.object({ a: z.object({ b: z.object({ c: z.array(z.enum(["x", "y"])) }) }) }),
  steps: z.object({ steps: z.array(z.object({ explanation: z.string(), output: z.string() })), answer: z.string() }),
  event: z.object({ name: z.string(), date: z.iso.date(), participants: z.array(z.string()) }),
  optional: z.object({ a: z.string().optional(), b: z.int().optional(), c: z.boolean().optional() }),
  tool: z.object({ path: z.string(), edits: z.array(z.object({ old: z.string(), new: z.string() })), dry: z.boolean() }),
  map: z.object({ scores: z.record(z.string(), z.number().min(0).max(1)) }),
  readonly: z.object({ a: z.array(z.int()).readonly() }), prefault: z.object({ a: z.string().prefault("x") }),
};
const written = Object.entries(leaves).map(([name, leaf]) => [name, z.object({ [name]: leaf })]);
const all = Object.fromEntries([...written, ...Object.entries(wholes)].map(([name, one]) => [name, z.toJSONSchema(one)]));
process.stdout.write(JSON.stringify(all, null, 1) + "\n");
